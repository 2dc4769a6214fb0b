import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;

/** Clients with access keys against the server at args[0], which knows "shop" and "books". Prints a line a fact. */
public class Secured {
    public static void main(String[] args) throws Exception {
        DefaultMQProducer producer = producer(args[0], "shop", "secret of shop");
        CountDownLatch seen = new CountDownLatch(20);
        CountDownLatch failed = new CountDownLatch(1);
        for (int number = 0; number < 20; number++) {
            producer.send(new Message("orders", "TagA", ("m" + number).getBytes()));
        }
        DefaultMQPushConsumer consumer =
            new DefaultMQPushConsumer("billing", new AclClientRPCHook(new SessionCredentials("books", "secret of books")));
        consumer.setNamesrvAddr(args[0]);
        consumer.setInstanceName("consumer");
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe("orders", "TagA");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            if (messages.get(0).getReconsumeTimes() == 0 && failed.getCount() > 0) {
                failed.countDown();
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;  // given back, and read from the group's retry topic
            }
            messages.forEach(message -> seen.countDown());
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        System.out.println("consumed " + seen.await(60, TimeUnit.SECONDS));
        System.out.println("other topic " + sent(producer, "secrets"));
        DefaultMQProducer wrong = producer(args[0], "shop", "another secret");
        System.out.println("wrong secret " + sent(wrong, "orders"));
        System.exit(0);
    }

    static DefaultMQProducer producer(String server, String key, String secret) throws Exception {
        DefaultMQProducer producer =
            new DefaultMQProducer("producers", new AclClientRPCHook(new SessionCredentials(key, secret)));
        producer.setNamesrvAddr(server);
        producer.setInstanceName("producer of " + secret);
        producer.start();
        return producer;
    }

    static boolean sent(DefaultMQProducer producer, String topic) throws Exception {
        try {
            producer.send(new Message(topic, "x".getBytes()));
            return true;
        } catch (MQClientException error) {
            return false;
        }
    }
}
