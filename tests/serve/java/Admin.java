import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** Runs the commands of mqadmin that it reads, one a line with tabs between the words, and prints "###" after each.
 *  "start" starts a consumer of `orders` and a producer, "consume N" waits for N messages, "leave" stops both. */
public class Admin {
    public static void main(String[] args) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("billing");
        DefaultMQProducer producer = new DefaultMQProducer("shop");
        AtomicInteger consumed = new AtomicInteger();
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.split("\t");
            if (words[0].equals("start")) {
                consumer.setNamesrvAddr(args[0]);
                consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
                consumer.subscribe("orders", "*");
                consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                    consumed.addAndGet(messages.size());
                    return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
                });
                consumer.start();
                producer.setNamesrvAddr(args[0]);
                producer.setInstanceName(consumer.getInstanceName()); // it knows the broker, and sends its heartbeat at once
                producer.start();
                System.out.println(consumer.buildMQClientId());
            } else if (words[0].equals("consume")) {
                while (consumed.get() < Integer.parseInt(words[1])) {
                    Thread.sleep(20);
                }
            } else if (words[0].equals("leave")) {
                consumer.shutdown();
                producer.shutdown();
            } else {
                MQAdminStartup.main0(words, null);
            }
            System.out.println("\n###");
            System.out.flush();
        }
        System.exit(0);
    }
}
