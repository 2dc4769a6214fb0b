import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageRequestMode;

/** What only clients of 5.x can do. */
public class Clients5 {
    static void scenarios() {
        Clients.scenario("timer", Clients5::timer);
        Clients.scenario("pop", Clients5::pop);
        Clients.scenario("codecs", Clients5::codecs);
        Clients.scenario("reset", Clients5::reset);
    }

    static String timer() throws Exception {
        DefaultMQPushConsumer consumer = Clients.consumer("timers", "one");
        consumer.subscribe("timers", "*");
        Clients.producer.send(Clients.message("timers", "a", "now"));
        List<String> seen = Clients.collect(consumer);
        Message later = Clients.message("timers", "a", "later");
        later.setDelayTimeMs(3000);
        Message never = Clients.message("timers", "a", "never");
        never.setDelayTimeMs(3000);
        long begin = System.nanoTime();
        Clients.producer.send(later);
        SendResult sent = Clients.producer.send(never);
        String id = Clients.producer.recallMessage("timers", sent.getRecallHandle());
        boolean came = Clients.until(30, () -> seen.contains("later"));
        long waited = System.nanoTime() - begin;
        Thread.sleep(1500);
        consumer.shutdown();
        if (!came || seen.contains("never")) return seen.toString();
        if (!id.equals(sent.getMsgId())) return id + " was recalled, not " + sent.getMsgId();
        return waited >= 2_990_000_000L ? null : "too early";
    }

    /** Two members that pop a topic: the server divides nothing, and one message fails once. */
    static String pop() throws Exception {
        Clients.producer.send(Clients.message("pops", "a", "first"));
        String address = Clients.producer.getDefaultMQProducerImpl().getMqClientFactory().findBrokerAddressInPublish("mqstore");
        Clients.producer.getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl()
            .setMessageRequestMode(address, "pops", "pop", MessageRequestMode.POP, 0, 3000);
        List<String> seen = Collections.synchronizedList(new ArrayList<>());
        List<Integer> attempts = Collections.synchronizedList(new ArrayList<>());
        Set<String> workers = ConcurrentHashMap.newKeySet();
        List<DefaultMQPushConsumer> members = new ArrayList<>();
        for (String name : List.of("one", "two")) {
            DefaultMQPushConsumer member = Clients.consumer("pop", name);
            member.setClientRebalance(false);
            member.setConsumeMessageBatchMaxSize(1);
            member.subscribe("pops", "*");
            member.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                workers.add(name);
                for (MessageExt message : messages) {
                    if (Clients.text(message).equals("bad")) {
                        attempts.add(message.getReconsumeTimes());
                        if (attempts.size() == 1) return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                    }
                    seen.add(Clients.text(message));
                }
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            member.start();
            members.add(member);
        }
        Clients.until(40, () -> seen.contains("first"));
        Thread.sleep(2000);
        for (int i = 0; i < 100; i++) Clients.producer.send(Clients.message("pops", "a", "m" + i));
        Clients.producer.send(Clients.message("pops", "a", "bad"));
        boolean all = Clients.until(60, () -> seen.size() >= 102);
        Thread.sleep(1000);
        for (DefaultMQPushConsumer member : members) member.shutdown();
        boolean right = all && seen.size() == 102 && Set.copyOf(seen).size() == 102 && attempts.equals(List.of(0, 1));
        return right && workers.size() == 2 ? null : seen.size() + " " + Set.copyOf(seen).size() + " " + attempts + " " + workers;
    }

    /** The group is reset to the beginning while a member runs: it hears of it, waits ten seconds and begins again. */
    static String reset() throws Exception {
        for (int i = 0; i < 40; i++) Clients.producer.send(Clients.message("resets", "a", "m" + i));
        DefaultMQPushConsumer consumer = Clients.consumer("resets", "one");
        consumer.subscribe("resets", "*");
        List<String> seen = Clients.collect(consumer);
        if (!Clients.until(30, () -> seen.size() == 40)) return seen.size() + " of 40";
        consumer.getDefaultMQPushConsumerImpl().getOffsetStore().persistAll(
            new java.util.HashSet<>(consumer.fetchSubscribeMessageQueues("resets")));
        String address = Clients.producer.getDefaultMQProducerImpl().getMqClientFactory().findBrokerAddressInPublish("mqstore");
        int moved = Clients.producer.getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl()
            .invokeBrokerToResetOffset(address, "resets", "resets", 0, true, 5000).size();
        boolean again = Clients.until(60, () -> seen.size() >= 80);
        consumer.shutdown();
        return again && Set.copyOf(seen).size() == 40 && moved > 0 ? null : seen.size() + " after " + moved + " queues moved";
    }

    static String codecs() throws Exception {
        DefaultMQPushConsumer consumer = Clients.consumer("codecs", "one");
        consumer.subscribe("codecs", "*");
        for (CompressionType type : CompressionType.values()) {
            DefaultMQProducer packer = new DefaultMQProducer("packers" + type);
            packer.setInstanceName("packer" + type);
            packer.setNamesrvAddr(Clients.server);
            packer.setCompressType(type);
            packer.start();
            packer.send(Clients.message("codecs", "a", type + "x".repeat(50_000)));
            packer.shutdown();
        }
        List<String> seen = Clients.collect(consumer);
        Clients.until(30, () -> seen.size() == CompressionType.values().length);
        consumer.shutdown();
        for (CompressionType type : CompressionType.values())
            if (!seen.contains(type + "x".repeat(50_000))) return type + " of " + seen.size();
        return null;
    }
}
